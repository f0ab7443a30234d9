-- The history of runs.

-- name: start_run
-- Notes that a run begins.
insert into ntt_backup.runs (run_id, target, host, pid, strategy, workers)
values (%(run_id)s, %(target)s, %(host)s, %(pid)s, %(strategy)s, %(workers)s);

-- name: update_run
-- Notes what a run has done so far, and with an outcome how it ended; a run without a recent update
-- has died. The figures of a run only grow: a statement that was given up while a lock held it is
-- carried out later than the next one.
update ntt_backup.runs
set updated_at = now(), copied = greatest(copied, %(copied)s),
    failed = greatest(failed, %(failed)s), bytes = greatest(bytes, %(bytes)s),
    outcome = %(outcome)s, exit_code = %(exit_code)s,
    ended_at = case when %(outcome)s::text is not null then now() end
where run_id = %(run_id)s and ended_at is null;

-- name: last_run
-- The target's latest run, and the server's time, by which the run's figures have an age.
select run_id, target, host, pid, strategy, workers, started_at, updated_at, ended_at, outcome,
    exit_code, copied, failed, bytes, clock_timestamp()
from ntt_backup.runs where target = %(target)s
order by started_at desc, run_id limit 1;
