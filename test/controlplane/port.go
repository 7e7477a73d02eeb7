package controlplane

import (
	"fmt"
	"strconv"
	"sync"
	"syscall"
)

// Port is a free TCP port on loopback that is kept for one server until it is released, also while the server is down.
//
// It is held by a socket that is bound with SO_REUSEADDR and never listens. The kernel gives a port that is held so to
// nobody who asks for any free one, but lets a server bind it by number if it sets SO_REUSEADDR too, as every Go
// listener does on Linux. So nothing can take the port between choosing and use, or between a kill and a restart.
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
	// As package net does where a socket can't be made close-on-exec at birth.
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

// URL returns the address behind a scheme, such as "http://127.0.0.1:PORT".
func (p *Port) URL(scheme string) string { return scheme + "://" + p.Address() }

// String returns the bare number.
func (p *Port) String() string { return strconv.Itoa(p.Number) }

// Release gives the port back. A server that listens on it isn't touched.
func (p *Port) Release() {
	p.release.Do(func() { _ = syscall.Close(p.socket) })
}
