"""`python -m ntt_backup` is `ntt-backup-remote`."""

from ntt_backup.cli import main

if __name__ == "__main__":
    main()
