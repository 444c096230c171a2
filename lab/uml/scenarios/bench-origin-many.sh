# W4 for `forkdisk bench w4`: an origin with N dm-snapshot snapshots, each with an exception store of its own (a slice
# of D1); on the device itself (what=raw) MIB=size of the origin STORE=MiB of each store OPS=random pages
# COUNTS=1,2,4,8,16; chunks of 64 KiB
MB=1048576; S=$((MIB*2048)); REP=1; cs=$((STORE*2048))
rnd() { $FORKDISK bench inside random $1 $((MIB*MB)) $OPS $2 12; }
dmsetup create base --table "0 $S linear $D0 0"
with() { n=$1
 for i in $(seq 1 $n); do dmsetup create cow$i --table "0 $cs linear $D1 $(((i-1)*cs))"; dd if=/dev/zero of=/dev/mapper/cow$i bs=64k count=1 status=none conv=fsync; done
 for i in $(seq 1 $n); do dmsetup create snap$i --table "0 $S snapshot /dev/mapper/base /dev/mapper/cow$i P 128"; done
 dmsetup create origin --table "0 $S snapshot-origin /dev/mapper/base"; }
without() { n=$1; dmsetup status snap$n | grep -q Invalid && echo "FAILED a snapshot became invalid"
 dmsetup remove origin; for i in $(seq 1 $n); do dmsetup remove snap$i; dmsetup remove cow$i; done; }
m "what=raw" $((MIB*MB)) dw /dev/mapper/base $MB $((MIB*MB))
for k in $(lst $COUNTS); do with $k; m "what=dd n=$k" $((MIB*MB)) dw /dev/mapper/origin $MB $((MIB*MB)); without $k; done
for depth in 1 32; do
 m "what=raw-random depth=$depth" $((OPS*4096)) rnd /dev/mapper/base $depth
 with 1; m "what=random depth=$depth n=1" $((OPS*4096)) rnd /dev/mapper/origin $depth; without 1
done
dmsetup remove base
