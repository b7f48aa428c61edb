"""The integers of a prepared model, by layer and quantizer. Nothing in this folder knows a file format.

The way through: `evaluation_copy` leaves what evaluation computes, `freeze` replaces quantizers and layers by modules
that hold their integers, and `Operations` says how these compute. A file format overrides `Operations`.
"""
