"""Object stores: s3://, gs:// and others that fsspec supports.

a place         url
requests        objects; upload, of large ones; waiting, what is told of slow ones
"""
