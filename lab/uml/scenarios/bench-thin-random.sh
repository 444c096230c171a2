# W2 for `forkdisk bench w2`: dm-thin, first writes of 4 KiB in random order after N snapshots, with nothing shared
# (N=0), and on the device itself MIB=512 OPS=1024 BETWEEN=8 COUNTS=1,16,256 DEPTHS=1,32 BS=64
MB=1048576; S=$((MIB*2048)); REP=1; sectors=$((${BS:-64}*2)); S0=$(blockdev --getsz $D0)
rnd() { $FORKDISK bench inside random $1 $((MIB*MB)) $2 $3 $4; }
for depth in $(lst $DEPTHS); do
 m "depth=$depth what=raw" $((OPS*4096)) rnd $D0 $OPS $depth 12
 pool $D0 $D1 $sectors $((S0/sectors*sectors)); pmsg "create_thin 0"; thin 0 $S
 dd if=/dev/zero of=/dev/mapper/thin0 bs=4M count=$((MIB/4)) oflag=direct status=none
 m "depth=$depth what=alone" $((OPS*4096)) rnd /dev/mapper/thin0 $OPS $depth 12
 last=0
 for k in $(lst $COUNTS); do
  while [ $last -lt $k ]; do last=$((last+1)); pmsg "create_snap $last 0"; [ $last = $k ] || rnd /dev/mapper/thin0 $BETWEEN $depth $last; done
  m "depth=$depth what=break snapshots=$k" $((OPS*4096)) rnd /dev/mapper/thin0 $OPS $depth $((k+5000))
 done
 dmsetup remove thin0; dmsetup remove pool
done
