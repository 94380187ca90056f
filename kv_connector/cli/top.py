def add(parsers): pass
