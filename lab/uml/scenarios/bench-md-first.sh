# W3 for `forkdisk bench w3`: md RAID5 of disks 0 to 3, disk 4 for dm-thin's metadata: the array, dm-thin on it, a pool
# on it COUNT requests of 2 MiB
dmsetup remove slice0; dmsetup remove slice1; AFTER=sync; modprobe raid456; n=$((COUNT*2097152)); REP=1; export XDG_RUNTIME_DIR=/run
dmesg -n 1; mdadm --create /dev/md5 --run --assume-clean --level=5 --raid-devices=4 --chunk=512 --metadata=1.2 --bitmap=none /dev/nbd0 /dev/nbd1 /dev/nbd2 /dev/nbd3 > /run/mdadm.log 2>&1 || { echo "FAILED mdadm: $(tail -3 /run/mdadm.log | tr "\n" " ")"; halt -f; }
echo 4096 > /sys/block/md5/md/stripe_cache_size; S0=$(blockdev --getsz /dev/md5)
drop; m "what=raw" $n bwfs /dev/md5 2097152 $n; sync
pool /dev/md5 /dev/nbd4 1024 $((S0/1024*1024)); pmsg "create_thin 0"; thin 0 $((n/512)); drop
m "what=thin-skip" $n bwfs /dev/mapper/thin0 2097152 $n; sync; dmsetup remove thin0; dmsetup remove pool
dd if=/dev/zero of=/dev/md5 bs=1M count=16 oflag=direct status=none
$FORKDISK init /dev/md5 --force > /run/init.log 2>&1 && $FORKDISK create /dev/md5/v --size $((n)) > /run/init.log 2>&1 || { echo "FAILED init: $(tail -1 /run/init.log)"; halt -f; }
$FORKDISK serve /dev/md5 --socket /run/p.sock > /run/serve.log 2>&1 & t=0
while [ ! -S /run/p.sock ] && [ $t -lt 100 ]; do sleep 0.1; t=$((t+1)); done
nbd-client -unix /run/p.sock /dev/nbd13 -N v > /dev/null 2>&1 || { echo "FAILED serve: $(tail -1 /run/serve.log)"; halt -f; }
echo 6144 > /sys/block/nbd13/queue/max_sectors_kb; drop
m "what=pool" $n bwfs /dev/nbd13 2097152 $n
