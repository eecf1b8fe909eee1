"""Files of the unweight format: payloads and bundles (spec/1.0).  NumPy only; no torch, no devices."""
