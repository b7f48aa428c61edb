"""Tests of qat.fused."""
