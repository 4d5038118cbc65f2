"""The reverse proxy in front of a SuperLink: exposes what nodes need, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

#: Most bytes of a request. Flower cuts arrays into pieces of 5 MB, so that no model needs more.
BODY_MB = 16

_CONFIG = """\
# Written by lightning-fed deploy. Only Flower's fleet API is reachable from outside: the control API, which starts runs
# on all nodes, shares a port with it, and is open to whoever can reach it.
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  server_tokens off;
  client_body_temp_path {folder}/nginx-body;
  proxy_temp_path {folder}/nginx-proxy;
  fastcgi_temp_path {folder}/nginx-fastcgi;
  uwsgi_temp_path {folder}/nginx-uwsgi;
  scgi_temp_path {folder}/nginx-scgi;
  client_max_body_size {body_mb}m;
  limit_conn_zone $binary_remote_addr zone=addresses:1m;
  limit_conn addresses 64;
  client_body_timeout 60s;
  client_header_timeout 20s;
  keepalive_timeout 75s;
  server {{
    listen {listen} ssl;
    ssl_certificate {certificates}/server.crt;
    ssl_certificate_key {certificates}/server.key;
    ssl_protocols TLSv1.2 TLSv1.3;
    location / {{ return 403; }}
    location ~ ^/v1/fleet/(register-node|unregister-node)$ {{ return 403; }}
    location ~ ^/v1/fleet/[a-z-]+$ {{
      limit_except POST {{ deny all; }}
      proxy_pass https://127.0.0.1:{port};
      proxy_ssl_verify on;
      proxy_ssl_trusted_certificate {certificates}/ca.crt;
      proxy_ssl_name localhost;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host 127.0.0.1;
      proxy_read_timeout 120s;
      proxy_request_buffering off;  # bodies are passed on as they come: neither kept in memory nor in files
      proxy_buffering off;
    }}
  }}
}}
"""


def config(folder: Path, listen: str, port: int, body_mb: int = BODY_MB) -> str:
    """The config of nginx for a server's folder.

    Args:
        folder: with certificates, and for nginx's own temporary files.
        listen: address and port for nodes.
        port: the SuperLink's port on this host.
        body_mb: most megabytes of a request.

    >>> "client_max_body_size 16m;" in config(Path("server"), "0.0.0.0:9092", 8000)
    True
    """
    where = folder.absolute()
    return _CONFIG.format(folder=where, certificates=where, listen=listen, port=port, body_mb=body_mb)


def executable() -> str | None:
    """The path of nginx, also where it is not in the PATH of users; None if it is not installed."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/bin")
