"""The Helm chart's values as a typed model; `tools/generate_chart.py` writes schema, defaults and README from it."""
