# ext4 and xfs on volumes of a served pool, through the kernel's nbd driver over 4 connections: mkfs, mount, files,
# fstrim, a snapshot of the mounted volume, unmount, fsck; then the snapshot through a clone: fsck, mount, the same
# files FORKDISK: the program; MBS: MiB of each file system; the pool lies on ubda
KIND=; P=/dev/ubda S=/run/nbd.sock M=/run/mnt F=$FORKDISK; mkdir -p $M; export FORKDISK_COLOR=never
modprobe nbd nbds_max=4 max_part=0 && modprobe ext4 && modprobe xfs || echo "FAILED modules"
# t WHAT COMMAND...: one step; says what failed, and that nothing else can be relied on
t() { what=$1; shift; echo "# $what"; "$@" > /run/out 2>&1 && return; echo "FAILED $what: $(tail -n 3 /run/out | tr '\n' ' ')"; tail -n 3 /run/serve.log; halt -f; }
same() { [ "$(cd $M && find . -type f | sort | xargs sha256sum | sha256sum)" = "$1" ] || { echo "the files have changed"; return 1; }; }
used() { $F stats $P --json | tr ',{}' '\n' | sed -n 's/^ *"used": *//p' | head -n 1; }
avail() { df -k --output=avail $M | tail -n 1; }
# xfs gives up the space of what was removed in the background, and nothing but sync and patience waits for that
gone() { n=0; while [ $(($(avail)-$1)) -lt 61440 ]; do n=$((n+1)); [ $n -lt 300 ] || { echo "$(avail) KiB free, $1 before"; return 1; }; sleep 0.1; done; sync; }
on() { t "nbd-client $2" nbd-client -unix $S /dev/nbd$1 -N $2 -C 4; }
off() { t "nbd-client -d" nbd-client -d /dev/nbd$1; }
fsck_of() { case $1 in ext4) e2fsck -f -n $2;; xfs) xfs_repair -n $2;; esac; }
t init $F init $P
for fs in ext4 xfs; do t create $F create $P/$fs --size ${MBS:-512}M; done
$F serve $P --socket $S > /run/serve.out 2> /run/serve.log & server=$!
n=0; while [ ! -S $S ] && [ $n -lt 300 ]; do sleep 0.1; n=$((n+1)); done
for fs in ext4 xfs; do
 on 0 $fs; empty=$(used)
 case $fs in ext4) t mkfs mkfs.ext4 -q -E lazy_itable_init=0,lazy_journal_init=0 /dev/nbd0;; xfs) t mkfs mkfs.xfs -q /dev/nbd0;; esac
 t mount mount -t $fs -o noatime /dev/nbd0 $M
 mkdir $M/tree $M/tree/deep; cp -r /usr/share/perl5 $M/tree/ 2> /dev/null || cp -r /etc $M/tree/ 2> /dev/null
 dd if=/dev/urandom of=$M/large bs=1M count=48 status=none; dd if=/dev/urandom of=$M/gone bs=1M count=64 status=none
 dd if=/dev/urandom of=$M/sparse bs=4096 count=7 seek=5000 status=none
 pids=; for i in 1 2 3 4 5 6 7 8; do (dd if=/dev/urandom of=$M/tree/deep/$i bs=5000 count=200 status=none; truncate -s 7777 $M/tree/deep/$i) & pids="$pids $!"; done; wait $pids
 t sync sync; full=$(used) left=$(avail); rm $M/gone; sync; t rm gone $left; t fstrim fstrim -v $M; sync; trimmed=$(used); told=$(sed 's/.*: //' /run/out)
 [ $((full-trimmed)) -ge $((60*1048576)) ] || { echo "FAILED fstrim: used $full before and $trimmed after ($told)"; halt -f; }
 sum=$(cd $M && find . -type f | sort | xargs sha256sum | sha256sum); files=$(find $M -type f | wc -l)
 drop; t "read back" same "$sum"
 t snapshot fsfreeze -f $M; t snapshot $F snapshot $P/$fs@then; t snapshot fsfreeze -u $M
 dd if=/dev/urandom of=$M/large bs=1M count=48 conv=notrunc status=none; rm -r $M/tree; sync
 t umount umount $M; t "fsck of $fs" fsck_of $fs /dev/nbd0; off 0
 t clone $F clone $P/$fs@then $P/$fs-then; on 1 $fs-then
 [ $fs = xfs ] && nouuid=,nouuid || nouuid=
 t "mount of the clone" mount -t $fs -o noatime$nouuid /dev/nbd1 $M; t "the clone's files" same "$sum"
 t "umount of the clone" umount $M; t "fsck of the clone" fsck_of $fs /dev/nbd1; off 1
 echo "R $SCEN fs=$fs files=$files used=$trimmed freed=$((full-trimmed)) rep=1 bytes=$full sec=1 MBps=1 | fstrim: $told"
done
kill -TERM $server; t "the server's end" wait $server; t check $F check $P
