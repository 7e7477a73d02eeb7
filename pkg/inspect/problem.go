package inspect

import (
	"errors"
	"fmt"
	"net/url"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// advise adds to an error what the person at the keyboard can do about it. host is the API server.
func (o *options) advise(err error, host string) error {
	var unreachable *url.Error
	switch {
	case err == nil:
		return nil
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("%w\nThe API server %s doesn't accept your credentials: log in anew, or choose another --context", err, host)
	case apierrors.IsForbidden(err):
		return fmt.Errorf("%w\nYou need the right to get, list and watch nodes, and to list and watch pods in all namespaces: "+
			"deploy/inspect/viewer.yaml has a ClusterRole", err)
	case errors.As(err, &unreachable) && !o.configured():
		return fmt.Errorf("no cluster is configured: name one with --kubeconfig, KUBECONFIG or --server (%w)", err)
	case errors.As(err, &unreachable):
		return fmt.Errorf("%w\nThe API server %s can't be reached: is this the --context that you mean, and is the network up?", err, host)
	}
	return err
}

// configured says whether anybody has told which cluster to ask. Where nobody has, client-go asks localhost.
func (o *options) configured() bool {
	config, err := o.connection.ToRawKubeConfigLoader().RawConfig()
	return err != nil || len(config.Clusters) > 0 || *o.connection.APIServer != ""
}
