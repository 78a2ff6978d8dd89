"""A model in files that others load: safetensors, whole tensors.

from a run    save_model, exported_parts
written       export, export_to_store
"""
