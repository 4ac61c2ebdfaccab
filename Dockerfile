# Image of the server and of an agent; docs/how_to/remote_server.md has the commands.
FROM python:3.12-slim
COPY . /src
RUN pip install --no-cache-dir "/src[notify]" && rm -rf /src
# A named volume gets the owner of the directory on which it is mounted.
RUN useradd --create-home zerolab && mkdir -p /data/checkpoints && chown -R zerolab /data
USER zerolab
ENV ZEROLAB_HOME=/data
EXPOSE 8080
CMD ["python", "-m", "zeroserver", "--host", "0.0.0.0", "--port", "8080", "--allow-remote"]
