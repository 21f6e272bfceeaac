"""The documented functions on rows of single heads: init, update, get, bytes of evicting methods.

They see keys and values only, so keys stand for queries where a method's score needs some: for
study and comparison. Caches of a model see the true queries and use `veloxquant.cache.evicting`.
"""
