"""The tables of docs/reference/{metrics,settings}.md, made from the programs' own registries and settings.

`hack/verify-reference` fails when a page differs from the code; `hack/verify-reference --write` writes them. What stands outside
the marked part of a page is written by hand and stays.
"""
