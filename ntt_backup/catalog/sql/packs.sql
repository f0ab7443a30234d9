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
-- Takes packs off the list.
delete from ntt_backup.packs where target = %(target)s and pack_id = any(%(pack_ids)s);

-- name: mark_packs_checked
-- Remembers that packs were found right.
update ntt_backup.packs set checked_at = now()
where target = %(target)s and pack_id = any(%(pack_ids)s);

-- name: next_packs
-- The next packs after a key, in the order of bytes.
select pack_id, key, low, high, blobs, size, checksum from ntt_backup.packs
where target = %(target)s and key collate "C" > %(past)s
order by key collate "C" limit %(limit)s;
