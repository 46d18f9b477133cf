# One image for every process of Midstream; the command says which: `midstream gateway`, `midstream llumlet`, ...
ARG PYTHON=3.11.14-slim-trixie

FROM python:${PYTHON} AS build
WORKDIR /src
COPY . .
RUN python -m venv --without-pip /opt/midstream \
    && pip --python /opt/midstream/bin/python install --no-cache-dir --disable-pip-version-check '.[postgres]'

FROM python:${PYTHON}
# Nothing in the running image can install or build anything.
RUN python -m pip uninstall --yes --quiet --root-user-action=ignore pip setuptools wheel \
    && useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin midstream \
    && install --directory --owner midstream --group midstream --mode 700 /var/lib/midstream
COPY --from=build /opt/midstream /opt/midstream
ENV PATH=/opt/midstream/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /var/lib/midstream
USER midstream
CMD ["midstream", "--help"]
