#!/bin/sh
# Makes a certificate authority and a certificate for the SuperLink, for trying TLS out:
#   sh certificates.sh FOLDER NAME...      NAME: each host name or IP address by which SuperNodes reach the SuperLink
# SuperNodes and `flwr run` need ca.crt only. In production, use a certificate of your own authority in its place.
set -eu
[ $# -ge 2 ] || { echo "usage: sh certificates.sh FOLDER NAME...   (such as: certificates localhost 127.0.0.1)" >&2; exit 2; }
folder=$1; shift
names=
for name in "$@"; do
    case $name in
        *:* | *[0-9].[0-9]*.[0-9]*.[0-9]*) names="$names,IP:$name" ;;
        *) names="$names,DNS:$name" ;;
    esac
done
umask 077  # keys are for their owner only
mkdir -p "$folder"
cd "$folder"
cat > server.ext << EXTENSIONS
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature, keyAgreement
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = ${names#,}
EXTENSIONS
openssl ecparam -name prime256v1 -genkey -noout -out ca.key
openssl req -x509 -new -key ca.key -days 365 -out ca.crt -subj "/CN=federation authority" \
    -addext "keyUsage = critical, keyCertSign, cRLSign"
openssl ecparam -name prime256v1 -genkey -noout -out server.key
openssl req -new -key server.key -out server.csr -subj "/CN=$1"
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -extfile server.ext -out server.crt
rm server.csr server.ext
echo "$(pwd): server.crt and server.key are for the SuperLink, ca.crt is for everyone"
