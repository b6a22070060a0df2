"""A JobSet on Google Kubernetes Engine. The command is ``launch/gke/job.sh``."""
