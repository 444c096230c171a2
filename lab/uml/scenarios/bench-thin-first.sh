# W3 for `forkdisk bench w3`: dd bs=2M through the page cache and past it: PEER=dm-thin: the device, then fresh thin
# volumes; PEER=pool: a fresh volume of a pool COUNT requests of 2 MiB
AFTER=sync; n=$((COUNT*2097152)); REP=1; S0=$(blockdev --getsz $D0 2>/dev/null || echo 0)
case $PEER in
pool) case $HOW in cached) m "what=pool how=cached" $n bwfs $V 2097152 $n;; direct) m "what=pool how=direct" $n dwf $V 2097152 $n;; esac;;
dm-thin) for how in cached direct; do w=bwfs; [ $how = direct ] && w=dwf
  drop; m "what=raw how=$how" $n $w $D0 2097152 $n
  for z in skip zero; do o="1 skip_block_zeroing"; [ $z = zero ] && o=0
   pool $D0 $D1 1024 $((S0/1024*1024)) "$o"; pmsg "create_thin 0"; thin 0 $((n/512)); drop
   m "what=thin-$z how=$how" $n $w /dev/mapper/thin0 2097152 $n; sync
   dmsetup remove thin0; dmsetup remove pool
  done; done;;
esac
