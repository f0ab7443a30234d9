-- What a glance at a target shows.

-- name: proved
-- Of a sample of the copied blobs how many were last found right in the last 7, 30 and 90 days, and
-- ever. The sample is of whole pages, and the same each time.
select count(*), count(*) filter (where {last_checked} > now() - interval '7 days'),
    count(*) filter (where {last_checked} > now() - interval '30 days'),
    count(*) filter (where {last_checked} > now() - interval '90 days'), count({last_checked})
from {blobs} tablesample system (%(percent)s) repeatable (1)
where {copied};

-- name: failure_examples
-- Of each reason the latest failures, of the first 10,000 on the target's list.
select blobid, reason, detail, attempts, first_at, last_at, {known_at}
from (
    select *, row_number() over (partition by reason order by last_at desc, blobid) as nth
    from (select * from ntt_backup.failures where target = %(target)s limit 10000) as listed
) as f
where nth <= %(each)s
order by reason, nth;
