"""Cloud TPU VM pods by queued resources. The command is ``launch/tpu_vm/pod.sh``."""
