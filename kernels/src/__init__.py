"""Decode and multiply by compressed weights on the device.  torch and Triton; no files."""
