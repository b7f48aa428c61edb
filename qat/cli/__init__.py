"""Command line `python -m qat VERB RUN ...`: a file for each verb."""
