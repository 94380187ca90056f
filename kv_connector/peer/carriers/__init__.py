"""How blocks travel between engines: each file is one way, behind the protocol of `peer/base.py`."""
