# What a file store asks of a remote without Python; any sh will do, and nothing is installed there. The lines before
# this one set action, place and what the action needs. Answers are name=value lines; "problem=..." says what failed.
# A file is written as .incoming-<token>, and gets its name once it is on stable storage.
umask 077
LC_ALL=C
export LC_ALL
temporary=$place/.incoming-${token:-none}

flat() { printf "%s" "$1" | tr "\n\r" "  " | cut -c1-1500; }
fail() {
    printf "problem=%s\n" "$(flat "$1")"
    exit 0
}
size_of() { stat -c %s "$1" 2>/dev/null || wc -c <"$1"; }
# When it got its name, in seconds since 1970; where neither tool says so, that is unknown.
arrival_of() { stat -c %Y "$1" 2>/dev/null || date -r "$1" +%s 2>/dev/null || echo none; }
sum_of() { sha256sum <"$1" | cut -d " " -f 1; }
# Each file is synced: what stands behind FUSE, SMB or 9p hears of nothing else. Then their names. A sync that
# knows no file systems says so; any other complaint is about the disk.
make_durable() {
    message=$(sync "$1" 2>&1) || fail "$message"
    message=$(sync -f "$place" 2>&1) && return
    case $message in
    *"nvalid option"* | *"nrecognized option"* | *"nknown option"* | *"llegal option"* | *[Uu]sage:*) sync ;;
    *) fail "$message" ;;
    esac
}

for tool in cat cut find id mkdir mv rm rmdir sha256sum sleep sync tail touch tr wc; do
    command -v "$tool" >/dev/null 2>&1 || fail "$tool: not found"
done
[ -d "$root" ] || fail "$root: no such directory"
# What tells the target from another one whose disk may be mounted here; empty where nothing is expected.
if [ -n "$identity" ]; then
    found=$(cat "$root/format.json" 2>/dev/null || cat "$root/.ntt-target.json" 2>/dev/null)
    case $found in
    *"\"$identity\""*) ;;
    *)
        printf "another=%s %s\n" "$identity" "$(flat "$found")"
        exit 0
        ;;
    esac
fi

case $action in
list)
    [ ! -d "$root/by-hash" ] || echo by-hash=present
    for file in "$place"/*; do
        [ -f "$file" ] || continue
        # Small files that are read with the list come with it.
        content=""
        case $file in *.json) content=$(cut -c1-4000 "$file" | tr -d "\n\r") ;; esac
        printf "file=%s %s %s %s\n" "${file##*/}" "$(size_of "$file")" "$(arrival_of "$file")" "$content"
    done
    ;;
try)
    made=""
    if [ ! -d "$place" ]; then
        message=$(mkdir "$place" 2>&1) || fail "$message (as $(id -un))"
        made=yes
    fi
    message=$({ : >"$temporary"; } 2>&1) || fail "$message (as $(id -un))"
    rm -f "$temporary"
    [ -z "$made" ] || rmdir "$place"
    echo tried=yes
    ;;
put)
    if [ ! -d "$place" ]; then
        message=$(mkdir "$place" 2>&1) || [ -d "$place" ] || fail "$message"
    fi
    # What others left that were killed; one of a series may stand still for hours.
    find "$place/" -maxdepth 1 -name ".incoming-*" -mmin +1440 -exec rm -f {} + 2>/dev/null
    if ! message=$({ cat >"$temporary"; } 2>&1); then
        rm -f "$temporary"
        fail "$message"
    fi
    # Whoever sent it may be gone: then it is nobody's, and no large file is summed for nobody.
    trap "" PIPE
    if printf "received=yes\n"; then
        make_durable "$temporary"
        printf "sum=%s\nsize=%s\n" "$(sum_of "$temporary")" "$(size_of "$temporary")"
        while [ -e "$temporary" ] && printf "unnamed=yes\n"; do
            sleep 1
        done
    fi 2>/dev/null
    rm -f "$temporary"
    ;;
name)
    [ "$(size_of "$temporary")" = "$bytes" ] || fail "$temporary has not $bytes bytes any more"
    [ ! -e "$place/$name" ] || { echo taken=yes; exit 0; }
    # Its time is that of the name, not that of the last byte.
    touch "$temporary"
    make_durable "$temporary"
    message=$(mv "$temporary" "$place/$name" 2>&1) || fail "$message"
    make_durable "$place/$name"
    echo named=yes
    ;;
drop)
    rm -f "$temporary"
    for name in $names; do
        [ -e "$place/$name" ] || continue
        message=$(rm -f "$place/$name" 2>&1) || fail "$message"
        echo "removed=$name"
    done
    echo dropped=yes
    ;;
get)
    [ -f "$place/$name" ] || { echo missing; exit 0; }
    echo found
    tail -c +"$first" "$place/$name"
    ;;
esac
