-- The packs of a bucket, as the ledger knows them.

-- name: insert_pack
-- Notes a pack. The same blobs make the same pack, so a batch that is recorded twice changes nothing.
insert into ntt_backup.packs as known (target, pack_id, key, low, high, blobs, size, checksum)
values (
    %(target)s, %(pack_id)s, %(key)s, %(low)s, %(high)s, %(blobs)s, %(size)s, %(checksum)s
)
on conflict (target, pack_id) do update
set key = excluded.key, low = excluded.low, high = excluded.high, blobs = excluded.blobs,
    size = excluded.size, checksum = excluded.checksum, sealed_at = now(), checked_at = null;

-- name: forget_packs
-- Takes packs off the list, but for those that were noted anew since a time.
delete from ntt_backup.packs
where target = %(target)s and pack_id = any(%(pack_ids)s)
    and (%(since)s::timestamptz is null or sealed_at < %(since)s::timestamptz);

-- name: mark_packs_checked
-- Remembers that packs were found right.
update ntt_backup.packs set checked_at = now()
where target = %(target)s and pack_id = any(%(pack_ids)s);

-- name: next_packs
-- The next packs after a key, in the order of bytes.
select pack_id, key, low, high, blobs, size, checksum from ntt_backup.packs
where target = %(target)s and key collate "C" > %(past)s
order by key collate "C" limit %(limit)s;

-- name: newest_pack
-- The pack that was noted last.
select pack_id, key, low, high, blobs, size, checksum, sealed_at from ntt_backup.packs
where target = %(target)s order by sealed_at desc limit 1;

-- name: packs_to_check
-- The packs that may hold blobids between two, those first that were checked, or tried in vain, longest
-- ago. What is checked or tried meanwhile comes last, and is left out. A sample is the same for the same seed.
select pack_id, key, low, high, blobs, size, checksum, greatest(checked_at, tried_at) as checked_at
from ntt_backup.packs left join {tries} on name = key
where target = %(target)s and coalesce(tried_at, '-infinity') < %(began)s::timestamptz
    and low collate "C" <= %(last)s and high collate "C" >= %(first)s
    and low collate "C" >= %(lo)s::text
    and (%(hi)s::text is null or low collate "C" < %(hi)s::text)
    and {mine_packed}
    and coalesce(checked_at, '-infinity') < %(before)s::timestamptz
    and (
        %(fraction)s::float8 is null
        or ('x' || left(md5(pack_id || %(seed)s::text), 7))::bit(28)::integer
            < %(fraction)s::float8 * 268435456
    )

-- name: count_packs_to_check
-- How many blobs these packs have.
select coalesce(sum(blobs), 0)::bigint from ({chosen}) as chosen;

-- name: next_packs_to_check
-- The next of them after one.
select * from ({chosen}) as chosen
where (coalesce(checked_at, '-infinity'), key collate "C")
    > (%(past_checked)s::timestamptz, %(past_key)s::text collate "C")
order by coalesce(checked_at, '-infinity'), key collate "C" limit %(limit)s;

-- name: check_bound
-- What was checked before this time is to be checked again; and the time of now.
select now() - make_interval(secs => %(older_than)s::float8), now();
