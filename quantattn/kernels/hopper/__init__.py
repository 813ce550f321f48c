"""Attention kernels in Gluon for Hopper (sm_90): decode, MLA decode and prefill."""
