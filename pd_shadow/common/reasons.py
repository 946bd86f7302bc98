"""Names of the reason enums: one spelling for API fields, metric labels and log fields."""

from google.protobuf.descriptor import EnumDescriptor


def label(descriptor: EnumDescriptor, value: int) -> str:
    """The enum value's name without its prefix, in lower case: PLACEMENT_REASON_STICKY -> sticky.

    A value this build does not know is its number, so that a newer peer never breaks a log line.
    """
    known = descriptor.values_by_number.get(value)
    if known is None:
        return str(value)
    zero: str = descriptor.values_by_number[0].name
    name: str = known.name
    return name.removeprefix(zero.removesuffix("UNSPECIFIED")).lower()


def labels(descriptor: EnumDescriptor) -> list[str]:
    """Every value's label but UNSPECIFIED's, in order of declaration."""
    return [label(descriptor, value.number) for value in descriptor.values if value.number]
