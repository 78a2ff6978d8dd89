"""Configuration files of other tools -> Config, and back, with a report on every key.

read from       read, any of them; accelerate, nemo
written for     to_accelerate
said            report
"""
