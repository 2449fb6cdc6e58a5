"""Measurements on a GPU: the decode block beside its dense peers, whole models, DRAM reads, and launch parameters."""
