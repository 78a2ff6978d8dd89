"""Object stores (s3://, gs:// and others that fsspec supports): URLs of places in them, and requests to them."""
