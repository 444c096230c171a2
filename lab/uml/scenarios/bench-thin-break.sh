# W2 for `forkdisk bench w2`: dm-thin, whole volumes written again: nothing shared, then everything shared, by size of a
# sub-job SIZES="BLOCK_KIB:IO_KIB:MIB ..." SUBS=64,512
MB=1048576; S0=$(blockdev --getsz $D0); REP=1; echo 512 > /sys/module/dm_mod/parameters/kcopyd_subjob_size_kb
for p in $(lst $SIZES); do bs=${p%%:*} mib=${p##*:} io=${p#*:}; io=${io%:*}; n=$((mib*MB)) S=$((mib*2048))
 for sub in $(lst ${SUBS:-64,512}); do
  echo $sub > /sys/module/dm_mod/parameters/kcopyd_subjob_size_kb
  pool $D0 $D1 $((bs*2)) $((S0/(bs*2)*(bs*2))); pmsg "create_thin 0"; thin 0 $S
  dd if=/dev/zero of=/dev/mapper/thin0 bs=8M count=$((mib/8)) oflag=direct status=none
  [ $sub = 512 ] && m "bs=$bs io=$io what=alone sub=$sub" $n dwf /dev/mapper/thin0 $((io*1024)) $n
  tsnap 0 1
  m "bs=$bs io=$io what=break sub=$sub" $n dwf /dev/mapper/thin0 $((io*1024)) $n
  dmsetup remove thin0; dmsetup remove pool
 done
done
