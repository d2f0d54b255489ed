"""The tables of docs/reference/{metrics,settings}.md, made from the programs' own registries and settings.

`hack/verify-reference` fails when a page is not what the code says; `hack/verify-reference --write` writes them. What stands outside
the marked part of a page is written by hand and stays.
"""
