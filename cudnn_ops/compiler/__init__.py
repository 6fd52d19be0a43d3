"""The backend of torch.compile: patterns, and what decides about them.

``backend.py`` is what Dynamo calls; ``rewrite.py`` finds and replaces, by the patterns listed in
``patterns/__init__.py``, and ``strides.py`` settles what depends on strides; ``nodes.py`` and
``match.py`` read graphs; ``masks.py`` recognizes attention masks by computing them; ``choice.py``
decides and ``report.py`` says what was decided.
"""
