// Package loopback protects servers on a loopback address from web pages of other sites.
package loopback

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// Is reports whether only processes of the same host reach a listener with this address.
func Is(address net.Addr) bool {
	tcp, ok := address.(*net.TCPAddr)
	return ok && tcp.IP.IsLoopback()
}

// Handler returns a handler for plain HTTP on a listener with this address. If that is a loopback address, it answers only requests whose
// Host is localhost or a loopback address; clients of other addresses use names that the server doesn't know.
//
// A site can let its own name resolve to 127.0.0.1 (DNS rebinding). To the browser a local server then has the origin of that site, so the
// site's scripts can read its answers. They can't change the Host.
func Handler(address net.Addr, next http.Handler) http.Handler {
	if !Is(address) {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !local(r.Host) {
			http.Error(w, fmt.Sprintf("this address answers only requests for localhost or a loopback address such as 127.0.0.1, not for the Host %.100q: "+
				"use one of them in the URL, or let your proxy set the Host", r.Host), http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// local reports whether a Host, with or without a port, is localhost or a loopback address.
func local(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	if strings.EqualFold(host, "localhost") {
		return true
	}
	address, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(host, "["), "]"))
	return err == nil && address.Unmap().IsLoopback()
}
