"""Saved training states: folder and manifest (no torch), write, read and export (torch)."""
