# Makes by-hash in root where it is missing, and gives the target an identity where it has none. The lines before
# this one set root, token and content. A marker appears whole and durable, and is never replaced.
umask 022
LC_ALL=C
export LC_ALL
message=$(mkdir "$root/by-hash" 2>&1) || [ -d "$root/by-hash" ] || { echo "$message"; exit 0; }
marker=$root/.ntt-target.json
[ ! -e "$root/format.json" ] || marker=$root/format.json
if [ ! -e "$marker" ]; then
    new=$root/.ntt-target.$token
    message=$({ printf "%s\n" "$content" >"$new"; } 2>&1) || { echo "$message"; exit 0; }
    sync -f "$root" 2>/dev/null || sync
    # Some file systems have no links; there is no other session then, as a rule.
    message=$({ ln "$new" "$marker" || mv -n "$new" "$marker"; } 2>&1)
    rm -f "$new"
    [ -e "$marker" ] || { echo "$message"; exit 0; }
    sync -f "$root" 2>/dev/null || sync
fi
printf "made=%s\n" "$(head -c 4000 "$marker" 2>&1 | tr -d "\n\r")"
