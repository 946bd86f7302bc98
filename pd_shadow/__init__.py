"""PD-Shadow: keep the next model warm on a prefill/decode-disaggregated cluster."""
