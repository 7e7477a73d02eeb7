package inspect

import (
	"errors"
	"fmt"
	"net/url"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// advise adds a hint for the user to an error.
func (o *options) advise(err error) error {
	var unreachable *url.Error
	host := ""
	if config, err := o.connection.ToRESTConfig(); err == nil {
		host = config.Host
	}
	switch {
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("%w\nThe API server %s doesn't accept your credentials: log in again, or choose another --context", err, host)
	case apierrors.IsForbidden(err) && (o.groups || o.pending) && *o.connection.Namespace != "":
		return fmt.Errorf("%w\nYou need the permission to list pods, and PodGroups if pods name them, in namespace %s", err, *o.connection.Namespace)
	case apierrors.IsForbidden(err):
		return fmt.Errorf("%w\nYou need the permission to list nodes, and pods in all namespaces: "+
			"deploy/inspect/viewer.yaml has a ClusterRole. With rights in one namespace, "+
			"use --pending -n NAMESPACE or --groups -n NAMESPACE", err)
	case errors.As(err, &unreachable) && !o.configured():
		return fmt.Errorf("no cluster is configured: set --kubeconfig, KUBECONFIG or --server (%w)", err)
	case errors.As(err, &unreachable):
		return fmt.Errorf("%w\nThe API server %s can't be reached: check --context and the network", err, host)
	}
	return err
}

// configured reports whether a cluster is configured. Without one, client-go connects to localhost.
func (o *options) configured() bool {
	config, err := o.connection.ToRawKubeConfigLoader().RawConfig()
	return err != nil || len(config.Clusters) > 0 || *o.connection.APIServer != ""
}
