package controlplane

import (
	"fmt"
	"strconv"
	"sync"
	"syscall"
)

// Port is a TCP port on loopback that stays reserved until it is released, even while its server is down.
//
// A socket that is bound with SO_REUSEADDR and never listens holds it. The kernel doesn't choose such a port for a bind
// to port 0, but a server can bind it by number if it also sets SO_REUSEADDR, as Go listeners do on Linux. So no other
// process can take the port before its first use or between a kill and a restart.
type Port struct {
	// Number is the port's number.
	Number int

	socket  int
	release sync.Once
}

// ReservePort reserves a free port.
func ReservePort() (*Port, error) {
	port, err := reservePort()
	if err != nil {
		return nil, fmt.Errorf("reserving a port on loopback: %w", err)
	}
	return port, nil
}

func reservePort() (*Port, error) {
	// As package net does on systems without SOCK_CLOEXEC.
	syscall.ForkLock.RLock()
	socket, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err == nil {
		syscall.CloseOnExec(socket)
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, err
	}
	number, err := bind(socket)
	if err != nil {
		_ = syscall.Close(socket)
		return nil, err
	}
	return &Port{Number: number, socket: socket}, nil
}

func bind(socket int) (int, error) {
	if err := syscall.SetsockoptInt(socket, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1); err != nil {
		return 0, err
	}
	if err := syscall.Bind(socket, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return 0, err
	}
	address, err := syscall.Getsockname(socket)
	if err != nil {
		return 0, err
	}
	return address.(*syscall.SockaddrInet4).Port, nil
}

// Address returns "127.0.0.1:PORT".
func (p *Port) Address() string { return "127.0.0.1:" + p.String() }

// URL returns the address with a scheme, such as "http://127.0.0.1:PORT".
func (p *Port) URL(scheme string) string { return scheme + "://" + p.Address() }

// String returns the number.
func (p *Port) String() string { return strconv.Itoa(p.Number) }

// Release releases the port. A server that listens on it isn't affected.
func (p *Port) Release() {
	p.release.Do(func() { _ = syscall.Close(p.socket) })
}
