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

-- name: latest_runs
-- The target's latest run, and those that are under way on other hosts; with the server's time, by
-- which the figures of a run have an age. One that was not heard of for some minutes has died.
select run_id, target, host, pid, strategy, workers, started_at, updated_at, ended_at, outcome,
    exit_code, copied, failed, bytes, clock_timestamp()
from (
    select *, row_number() over (order by started_at desc, run_id) as nth
    from ntt_backup.runs where target = %(target)s
) as runs
where nth = 1 or (ended_at is null and updated_at > now() - interval '10 minutes')
order by nth limit 100;
