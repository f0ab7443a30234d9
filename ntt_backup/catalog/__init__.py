"""The catalog: what is to be sent, who sends it, and the ledger of what came of it.

The only package that speaks to PostgreSQL. Every error that leaves it is a `CatalogUnavailable` (it
may come back), a `CatalogRefused` (someone must act) or a `ConfigError` (the connection string).

It has three rooms above `connection` and `pending`, which all of them use:

- what a run uses, claims and ledger: `range_locks`, `ledger`; for files that go by their paths
  `foreign_query`, `origin_passes`, `unread_files`, `listed_files`
- questions, which change nothing but notes: `failures`, `selection`, `stats`, `history`
- what an administrator uses, `init-db` and restores: `privileges`, `schema_check`, `schema`,
  `restore_role`
"""
