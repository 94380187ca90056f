"""Storage in a store of objects, whatever the store: how blocks are grouped, named, checked and found again."""
