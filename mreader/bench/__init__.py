"""Measurements: the decode block beside its dense peers, whole models, DRAM reads, servers, launch parameters."""
