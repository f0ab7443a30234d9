"""The catalog: what is to be sent, who sends it, and the ledger of what came of it.

The only package that speaks to PostgreSQL. Every error that leaves it is a `CatalogUnavailable` (it
may come back), a `CatalogRefused` (someone must act) or a `ConfigError` (the connection string).
"""
