# The remote end of the tar strategy: extract batch after batch from one stream, and answer for each.
#
# Sent over the connection and run by the remote's sh; needs the tools that are looked for below.
# The lines before this one set root, owner, run, slot, token and identity (empty: any target will do). Then, on stdin, for each batch:
#     "<number> <bytes> <files>\n", <bytes> of tar archive, "commit\n" or "abort\n"
# and on stdout, a line each:
#     "NTT-TAR 2 ready exact|lockstep"     once, when batches may come
#     "NTT-TAR 2 fatal|gone|another <text>" once, instead
#     "got <number>"                        the archive was read to its end
#     "NTT-TAR 2 end"                       once, after an empty line: nothing of ours is left here
#     "ok <number>" | "err <number> <text>" | "gone|another <number> <text>"
#     "aborted <number>"
# A batch is extracted below .ntt-incoming and synced, hard-linked into by-hash, and synced again before it is
# ok. So a name below by-hash never shows a half-written file, not even after a power cut, and what is there
# already is replaced only if it differs.
# "gone" says that the disk is away, not that a batch is bad: by-hash or our own scratch space is missing.
# "another" says that the target has not the identity: it is not the one whose blobs the catalog knows.

umask 022
unset TAR_OPTIONS POSIXLY_CORRECT
LC_ALL=C
export LC_ALL

flat() { printf "%s" "$1" | tr "\n\r" "  " | cut -c1-1500; }
refuse() {
    printf "\nNTT-TAR 2 %s %s\n" "$1" "$(flat "$2")"
    exit 1
}

for tool in tar head cat cp mv cmp df find sync cut tr rm mkdir sed wc; do
    command -v "$tool" >/dev/null 2>&1 || refuse fatal "$tool: not found"
done

message=$(cd "$root" 2>&1) || refuse fatal "$message"
cd "$root" || exit 1
# Of a link that leads to another disk meanwhile this session knows nothing: its files stay together.
root=$(pwd -P)
place=$root/by-hash
incoming=$root/.ntt-incoming
# Never made here: where a disk is not mounted, it would be made on the one below.
[ -d "$place" ] || refuse gone "$place: no such directory"
marker() { cat "$root/format.json" 2>/dev/null || cat "$root/.ntt-target.json" 2>/dev/null; }
ours() {
    [ -n "$identity" ] || return 0
    case $(marker) in *"\"$identity\""*) ;; *) return 1 ;; esac
}
ours || refuse another "$(marker)"

# What dead sessions of ours left: this worker's own of this run, and those of earlier runs. Nothing tells
# that such a session lives, so its stage must not have changed for a day. Where a stage has a lock, a receiver
# made it, and removes it: it may give names to directories of it at this moment.
for old in "$incoming/$owner".*; do
    [ ! -e "$old/lock" ] || continue
    case $old in
    "$incoming/$owner.$run.$slot".*) rm -rf "$old" ;;
    "$incoming/$owner.$run".*) ;;
    *) find "$old" -maxdepth 0 -mmin +1440 -exec rm -rf {} + 2>/dev/null ;;
    esac
done
# Made new: a process has its number on this machine alone, and others may use the same directory.
stage=$incoming/$owner.$run.$slot.$token
make_stage() { mkdir -p "$incoming" && mkdir "$stage"; }
# Several times, because a session that ends may just remove .ntt-incoming, and a disk may just be swapped.
tries=0
until message=$(make_stage 2>&1); do
    tries=$((tries + 1))
    [ "$tries" -ge 5 ] || continue
    ours || refuse another "$(marker)"
    refuse fatal "$message"
done
# When the link is gone, an answer must not end this shell before it has removed what it made.
trap : PIPE

# Some heads read ahead and would swallow what follows a batch; then the two sides take turns.
turn=lockstep
if printf "abcdef\n" | { head -c 3 >/dev/null && IFS= read -r rest && [ "$rest" = def ]; }; then
    turn=exact
fi
# A sync that knows no file systems says so; any other complaint is about the disk.
barrier=file-system
if ! message=$(sync -f "$stage" 2>&1); then
    case $message in
    *"nvalid option"* | *"nrecognized option"* | *"nknown option"* | *"llegal option"* | *[Uu]sage:*) barrier=all ;;
    *) refuse fatal "sync: $message" ;;
    esac
fi

# What stands behind these hears of a file's own sync only: FUSE and virtiofs, SMB, 9p, vboxsf, eCryptfs.
[ "$barrier" != file-system ] ||
    case $(stat -f -c %t "$place" 2>/dev/null) in
    65735546 | f[ef]534d42 | 517b | 1021997 | 786f4256 | f15f) barrier=files ;;
    esac

mount_point() { df -P "$1" | sed -n "2s/^.*% *//p"; }
mounted=$(mount_point "$place")

# One file that could not be linked. No link and no border between file systems is ever crossed: what lies
# beyond would not be synced with the rest.
place_one() {
    name=${1#./}
    target=$place/$name
    directory=${target%/*}
    if [ -h "$place/${name%%/*}" ] || [ -h "$directory" ]; then
        echo "$directory: a symbolic link stands in its place"
        return 1
    fi
    mkdir -p "$directory" || return 1
    if [ "$directory" != "$known" ]; then
        here=$(mount_point "$directory")
        if [ -z "$here" ] && [ -n "$mounted" ]; then
            echo "df says nothing of $directory" # It may have been killed.
            return 1
        fi
        if [ "$here" != "$mounted" ]; then
            echo "$directory: is on another file system than $place"
            return 1
        fi
    fi
    known=$directory
    if [ -h "$target" ]; then
        rm -f "$target" # where it leads to a directory, mv would move into that
    elif cmp -s "$1" "$target"; then
        return 0
    elif [ -d "$target" ]; then
        echo "$name: a directory stands in its place"
        return 1
    fi
    said=$(mv -f "$1" "$target" 2>&1) && return 0
    if [ -e "$target" ] && [ -w "$directory" ]; then
        echo "$name: cannot be replaced: $said"
    else
        echo "$said"
    fi
    return 1
}

# cp links what is new, in one go. A file that cp could not link still has a single link: its name is taken,
# or this file system has no links; those are looked at one by one. Every file is accounted for: a cp or find
# that was killed, or a scratch space that was swept away, must not look like success.
place_all() {
    cd "$stage/$number" || return 1
    case $barrier in
    file-system) sync -f . || return 1 ;;
    files)
        find . -type f >"$stage/$number.all" && find . -type d >"$stage/$number.above" || return 1
        xargs sync <"$stage/$number.all" || return 1
        ;;
    *) sync ;;
    esac
    cp -Rl . "$place/" 2>/dev/null
    find . -type f -links 1 >"$stage/$number.left" || return 1
    placed=0 known=""
    while IFS= read -r file; do
        place_one "$file" || return 1
        placed=$((placed + 1))
    done <"$stage/$number.left"
    placed=$((placed + $(find . -type f -links +1 | wc -l)))
    if [ "$placed" != "$files" ]; then
        echo "$placed of $files files were put in place"
        return 1
    fi
    case $barrier in
    file-system) sync -f "$place" ;;
    files) cd "$place" && xargs sync <"$stage/$number.all" && sync_directories ;;
    *) sync ;;
    esac
}

# Some of these file systems have no sync of directories.
sync_directories() {
    said=$(xargs sync <"$stage/$number.above" 2>&1) && return
    case $said in
    *"nvalid argument"*) ;;
    *)
        echo "$said"
        return 1
        ;;
    esac
}

# Whether the remote can store at all, so that a batch can be blamed for what went wrong with it.
alive() {
    [ -d "$place" ] && head -c 65536 /dev/zero >"$stage/$number.sign" && rm "$stage/$number.sign"
}

finish() {
    if [ "$verdict" != commit ]; then
        printf "aborted %s\n" "$number"
    elif [ "$status" = 0 ] && message=$(place_all 2>&1) && ours; then
        printf "ok %s\n" "$number"
    elif [ -d "$place" ] && ! ours; then
        printf "another %s %s\n" "$number" "$(flat "$(marker)")"
    elif sign=$(alive 2>&1); then
        printf "err %s %s\n" "$number" "$(flat "$message")"
    elif [ -d "$place" ] && [ -d "$stage" ]; then
        printf "err %s %s\n" "$number" "$(flat "$sign; $message")"
    else
        printf "gone %s %s\n" "$number" "$(flat "$message")"
    fi
    rm -rf "${stage:?}/$number" "$stage/$number".*
}

printf "\nNTT-TAR 2 ready %s\n" "$turn"
while IFS=" " read -r number bytes files; do
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
    finish &
done
wait
cd / && rm -rf "$stage"
rmdir "$incoming" 2>/dev/null
printf "\nNTT-TAR 2 end\n"
exit 0
