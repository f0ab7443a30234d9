# The far side of the tar strategy: extract batch after batch from one stream, and answer for each.
#
# Sent over the connection and run by the remote's sh; needs tar, head, cp, mv, cmp, find, sync, cut and tr.
# The lines before this one set root, owner, run and slot. Then, on stdin, for each batch:
#     "<number> <bytes>\n", <bytes> of tar archive, "commit\n" or "abort\n"
# and on stdout, a line each:
#     "NTT-TAR 1 ready exact|lockstep"     once, when batches may come
#     "NTT-TAR 1 fatal <text>"             once, instead
#     "got <number>"                        the archive was read to its end
#     "ok <number>" | "err <number> <text>" | "aborted <number>"
# A batch is extracted below .ntt-incoming, hard-linked into by-hash, and synced before it is ok. So a name
# below by-hash never shows a half-written file, and what is there already is replaced only if it differs.

umask 022
unset TAR_OPTIONS POSIXLY_CORRECT
LC_ALL=C
export LC_ALL

flat() { printf "%s" "$1" | tr "\n\r" "  " | cut -c1-1500; }
fatal() {
    printf "\nNTT-TAR 1 fatal %s\n" "$(flat "$1")"
    exit 1
}

for tool in tar head cp mv cmp find sync cut tr rm mkdir; do
    command -v "$tool" >/dev/null 2>&1 || fatal "$tool: not found"
done

message=$(cd "$root" 2>&1) || fatal "$message"
cd "$root" || exit 1
place=$root/by-hash
incoming=$root/.ntt-incoming
message=$(mkdir -p "$place" 2>&1) || fatal "$message"

# What dead sessions of ours left: those of earlier runs, and this worker's own of this run.
for old in "$incoming/$owner".*; do
    case $old in
    "$incoming/$owner.$run.$slot".*) rm -rf "$old" ;;
    "$incoming/$owner.$run".*) ;;
    *) rm -rf "$old" ;;
    esac
done
stage=$incoming/$owner.$run.$slot.$$
# Twice, because a session that ends may just remove .ntt-incoming.
message=$(mkdir -p "$stage" 2>&1 || mkdir -p "$stage" 2>&1) || fatal "$message"
# When the link is gone, an answer must not end this shell before it has removed what it made.
trap : PIPE

# Some heads read ahead and would swallow what follows a batch; then the two sides take turns.
turn=lockstep
if printf "abcdef\n" | { head -c 3 >/dev/null && IFS= read -r rest && [ "$rest" = def ]; }; then
    turn=exact
fi
if sync -f "$stage" 2>/dev/null; then barrier=file-system; else barrier=all; fi

place_one() {
    if [ -h "$place/$1" ]; then
        rm -f "$place/$1" # where it leads to a directory, mv would move into that
    elif cmp -s "$1" "$place/$1"; then
        return 0
    elif [ -d "$place/$1" ]; then
        echo "$1: a directory stands in its place"
        return 1
    fi
    mkdir -p "$place/${1%/*}" && mv -f "$1" "$place/$1"
}

# cp links what is new, in one go. A file that cp could not link still has a single link: its name is taken,
# or this file system has no links; those are looked at one by one.
place_all() {
    cd "$stage/$number" || return 1
    cp -Rl . "$place/" 2>/dev/null
    find . -type f -links 1 | while IFS= read -r file; do
        place_one "$file" || exit 1
    done || return 1
    if [ "$barrier" = file-system ]; then sync -f "$place"; else sync; fi
}

settle() {
    if [ "$verdict" != commit ]; then
        printf "aborted %s\n" "$number"
    elif [ "$status" != 0 ]; then
        printf "err %s %s\n" "$number" "$(flat "$message")"
    elif message=$(place_all 2>&1); then
        printf "ok %s\n" "$number"
    else
        printf "err %s %s\n" "$number" "$(flat "$message")"
    fi
    rm -rf "${stage:?}/$number"
}

printf "\nNTT-TAR 1 ready %s\n" "$turn"
while IFS=" " read -r number bytes; do
    status=1
    message=$(mkdir "$stage/$number" 2>&1 && cd "$stage/$number" 2>&1 && echo entered)
    if [ "$message" = entered ]; then
        cd "$stage/$number" || exit 1
        message=$({ head -c "$bytes" | {
            tar -x -o -f -
            status=$?
            cat >/dev/null
            exit "$status"
        }; } 2>&1)
        status=$?
    else
        head -c "$bytes" >/dev/null
    fi
    printf "got %s\n" "$number"
    IFS= read -r verdict || break
    # The next batch is extracted while this one is placed and synced; receipts stay in order.
    wait
    settle &
done
wait
cd / && rm -rf "$stage"
rmdir "$incoming" 2>/dev/null
exit 0
