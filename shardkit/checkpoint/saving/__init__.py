"""A save: complete, or not there.

request       save_request, async_save; lock, claim: one run per folder
one save      opening, put, nan, write, attempt, commit
into a store  in_store
afterwards    retention, additions
before all    shared_storage: before training
"""
