"""Stores of objects (s3://, gs://, what fsspec reaches): names for places in them, and what is asked of them."""
