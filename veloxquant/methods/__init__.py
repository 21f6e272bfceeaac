"""One module a method; the table in `cache/table.py` names them."""
