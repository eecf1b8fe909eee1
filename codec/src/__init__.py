"""Bits of weights to stored bytes and back: arrays in, arrays out.  No files, no torch."""
